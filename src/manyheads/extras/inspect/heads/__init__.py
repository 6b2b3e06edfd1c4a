"""Which heads a model needs: figures of each head, models without some of them, and scores by the share of heads."""
