"""One file per kernel: formula, torch reference, launcher, CASES. Import the file you need; nothing is imported here.

(Hugging Face publishes a package of the same name, and transformers looks for it and reads its version.)
"""

__version__ = "0.0.0"
