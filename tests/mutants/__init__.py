"""Planted bugs outside of the pure core: each is a small change that a fast test of its room must notice.

A file `<room>_mutants.py` holds functions `name(set_attribute)` that replace attributes as pytest's monkeypatch.setattr does,
and `MUTANTS`: the name of each -> (the function, the tests of which at least one must fail).

    python -m tests.mutants                    all of them; exit status 1 when one survives
    python -m tests.mutants executor deploy    those of these rooms
"""
