"""The way between the engine process and its clients: frames over a private AF_UNIX socket. Pure but for sockets and threads."""
