"""Tests with published weights (weights.py), which are downloaded once and kept in the cache of the user's tests."""
