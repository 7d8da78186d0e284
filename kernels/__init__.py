"""One file per kernel: formula, torch reference, launcher, CASES. Import the file you need; nothing is imported here.

`__version__` exists because transformers looks for a Hugging Face package of the same name and reads its version.
"""

__version__ = "0.0.0"
