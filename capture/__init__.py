"""Reading activations from stock vLLM while it serves: the lowest layer of headgate."""
