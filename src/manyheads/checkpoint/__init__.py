"""Files that survive crashes: written aside, synced, committed by a rename, verified on load; tensors and JSON only."""
