"""Says where a step's time goes: `traces` reads profiles, `analysis` computes, `findings` judges, `page` shows."""
