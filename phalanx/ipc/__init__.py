"""How processes talk to each other: local sockets, one handshake, child processes, stop requests."""
