"""The encoder-decoder Transformer (Vaswani et al. 2017), and a classifier and a chart parser with its encoder."""
