"""One rank: its KV storage, input batch and model runner, and the WorkerGroup that runs it in this process."""
