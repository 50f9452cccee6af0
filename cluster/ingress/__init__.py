"""HTTP: the OpenAI and Vertex AI protocols, health, metrics and the playground page. Text lives here, tokens below."""
