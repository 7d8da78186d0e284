"""One rank: KV storage, the input batch of the slots, the model runner; and the WorkerGroup of this process."""
