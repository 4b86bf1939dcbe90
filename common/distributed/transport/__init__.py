"""Links between ranks (sockets, TLS, shared memory), all-reduce algorithms and their cost model. Imports no torch."""
