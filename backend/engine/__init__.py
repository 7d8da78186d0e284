"""EngineCore.step(), intake, update, the engine process and its typed IPC."""
