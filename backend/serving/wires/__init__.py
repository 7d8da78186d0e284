"""The wires: one front for each Triton model that clients of other servers know. `roles.py` names them all."""
