"""Text: tokenizer, chat template, incremental detokenizer, stop strings. Only the ingress and the CLI use this room."""
