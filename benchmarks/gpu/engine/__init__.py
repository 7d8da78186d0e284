"""The engine end to end, in this process, with weights made in place."""
