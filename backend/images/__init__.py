"""Images of requests, from files to what the engine takes: decoded in a process with limits, and put into prompts."""
