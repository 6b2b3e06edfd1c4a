"""The protocols that the server speaks, one file each, and what they share."""
