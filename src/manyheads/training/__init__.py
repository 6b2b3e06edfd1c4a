"""Training: the loop, its records, optimisers and plans. It receives an objective and does not depend on any task."""
