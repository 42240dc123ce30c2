"""Calls that check and measure a loaded bundle: golden outputs, random inputs, latencies, independent rows."""
