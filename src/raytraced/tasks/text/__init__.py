"""The task of texts: what the next byte, or the next token, will be."""
