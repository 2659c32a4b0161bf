"""How outside data enters: watermark policies and what they observe."""
