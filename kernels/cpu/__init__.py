"""The native CPU kernels and their bindings: build.py compiles the C++ in native/ on first use. Nothing is imported here."""
