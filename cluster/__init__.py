"""Everything that knows Ray: deployments, HTTP, routing, the command line."""
