"""Several engines behind one socket: each request runs on one of them (docs/design/replicas.md)."""
