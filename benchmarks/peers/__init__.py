"""One file per peer, each loaded in a subprocess with the interpreter that has the peer."""
