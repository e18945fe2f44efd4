"""Other people's quantizers behind our readers, for comparison and for reproducing published artifacts."""
