"""The shapes of requests. Every field is honoured; what can't be is refused by name (see `unavailable.py`)."""
