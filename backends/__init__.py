"""One package per kind of hardware; each implements engine.backend.Backend."""
