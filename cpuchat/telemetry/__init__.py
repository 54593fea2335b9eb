"""From events and counters to figures: pure, without files, clocks and stores."""
