"""Translation: sentence pairs, an encoder-decoder, BLEU and chrF."""
