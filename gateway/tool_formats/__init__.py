"""How families of models write tool calls: one file a format, and the table of all of them (table.py)."""
