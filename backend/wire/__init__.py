"""Connects the engine process and its clients: frames over a private AF_UNIX socket. Pure, except for sockets and threads."""
