"""Reads traces only, and says what they show: verdict, blame, pictures, exports."""
