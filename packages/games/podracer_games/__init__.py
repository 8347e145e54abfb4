"""Board games of two players: self-play, AlphaZero and matches."""
