"""The native CPU kernels: native/ is the C++ part, build.py compiles it on first use. Nothing is imported here."""
