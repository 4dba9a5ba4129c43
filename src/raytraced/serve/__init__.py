"""A server that keeps deadlines: answers of loaded models over HTTP."""
