"""Other projects' Python interfaces over this project's engine: TensorRT-LLM's LLM API and its executor bindings, LMDeploy's
pipeline.

Each is a room of its own and translates only: every capability is the engine's. `compat.llm`, `compat.trtllm` and
`compat.lmdeploy` are the names under which programs import them.
"""
