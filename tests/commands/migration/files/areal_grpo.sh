python3 -m areal.launcher.local gsm8k_rl.py --config areal_grpo.yaml gconfig.n_samples=8 actor.eps_clip=0.3
