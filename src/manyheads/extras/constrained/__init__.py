"""Output that matches a regular expression or a JSON schema, or contains given phrases."""
