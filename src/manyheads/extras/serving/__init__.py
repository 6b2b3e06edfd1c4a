"""An HTTP server for trained models: an engine that runs many requests together, and adapters for several protocols."""
