"""The engine's own state and messages: Sequence and its transitions, step messages, the clock. Pure."""
