"""Tests of one contract for both transports."""
