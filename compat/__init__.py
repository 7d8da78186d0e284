"""Other projects' Python interfaces over this project's engine: TensorRT-LLM's LLM API and its executor bindings.

Each is a room of its own and translates only: every capability is the engine's. `compat.llm` and `compat.trtllm` are the
names under which programs import them.
"""
