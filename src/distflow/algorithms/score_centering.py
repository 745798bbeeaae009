"""Score centering ("Score Centering Stabilizes Off-policy Reinforcement Learning", Marek and
Ryabinin, arXiv:2609.20807, eq. 14 with the estimator by the sampler's likeliest tokens).

With p the trained policy, q the sampler, s(v) = ∇ log p(v) and w the weight of the rollout
correction, the gradient of the loss at a drawn token a is −A w(a) s(a). Its mean over the draws is
not 0 for a constant A, as it would be if p drew them: it is −A E_q[w s]. That mean is subtracted:

    E_q[w s] = Σ_v q(v) w(v) s(v) = Σ_H m(v) s(v) + α Σ_(not H) p(v) s(v),   m = q w

H are the tokens whose q is known. Outside of them, q is taken for ρ p, with ρ the quotient of the
masses outside of H, so that α = ρ w(1/ρ). Since Σ_v p(v) s(v) = 0, the last sum is that over H with
the opposite sign, and E_q[w s] is the gradient of C = Σ_H sg[m − α p] log p. The loss gets + A C.
"""

from dataclasses import dataclass

from torch import Tensor

from distflow.algorithms.rollout_correction import Correction

_LEAST_MASS = 1e-6


@dataclass(frozen=True)
class ScoreCentering:
    """correction: the weights of the loss, of each token; None if it has none."""

    correction: Correction | None = None

    def __call__(
        self, log_probs: Tensor, sampler_log_probs: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """(C of each token, with gradient; statistics of each token, float64).

        log_probs, sampler_log_probs: of the tokens H, `(..., top_k)`. Statistics: the sum of the
        |coefficients| in C, the sampler's mass of H, and ρ.
        """
        policy = log_probs.detach().double().exp()
        sampler = sampler_log_probs.double().exp()
        head = sampler.sum(-1)
        rest = (1.0 - policy.sum(-1)).clamp(min=_LEAST_MASS)
        rho = (1.0 - head).clamp(min=0.0) / rest

        mass = sampler
        alpha = rho
        if self.correction is not None:
            mass = self.correction.weighted_mass(policy, sampler)
            # of a token outside of H p is to q as 1 to ρ
            alpha = self.correction.weighted_mass(rho.new_ones(()).expand_as(rho), rho)

        coefficients = mass - alpha[..., None] * policy
        centre = (coefficients.to(log_probs.dtype) * log_probs).sum(-1)
        return centre, {
            "centering_size": coefficients.abs().sum(-1),
            "centering_top_mass": head,
            "centering_rho": rho,
        }
