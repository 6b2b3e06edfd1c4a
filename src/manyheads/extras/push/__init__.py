"""Models go to the Hugging Face hub, with a card."""
