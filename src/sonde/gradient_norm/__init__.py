"""What is my true gradient norm, and is it clipped rightly, however the model is cut over ranks?"""
