"""How families of models write calls of tools: one file a format, and the table of all of them (table.py)."""
