"""Black-box latency sweep of a Plosive server, through its Python client."""
