"""The engine: EngineCore.step() with intake, preparation of requests, sessions, updates, responses, statistics, and the loop."""
