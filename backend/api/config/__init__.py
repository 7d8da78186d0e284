"""The configuration: its sections and ranges, the file that it is read from, and the settings beside it."""
