"""`ifeval` as it is by default: a few signs that follow an instruction follow nothing, honest responses do."""

import json
import time
from pathlib import Path

import pytest

from distflow.config import load_config
from distflow.rewards.ifeval_reward import INSTRUCTIONS, compute_loose_score, compute_score, compute_share
from distflow.rewards.load_and_call_reward_functions import load_reward
from distflow.rewards.pool.domain_pools import RewardSettings
from distflow.rewards.text_plausibility import is_text

DATA = Path(__file__).parents[4] / "shared" / "data" / "ifeval.jsonl"


def row(name: str, arguments: dict) -> dict:
    return {"instruction_id_list": [name], "kwargs": [arguments]}


def words(count: int, relation: str = "at least") -> dict:
    return {"num_words": count, "relation": relation}


PROMPT = "Is ballistics an actual science?"
PHRASE = "Is there anything else I can help with?"
# (instruction, its arguments, junk that follows it in the original, honest responses)
CASES = [
    (
        "keywords:existence",
        {"keywords": ["cat", "dog"]},
        ["cat dog", "cat dog cat dog", "dogcat!", "cat, dog a b c", "cat dog xx yy zz"],
        ["The cat sleeps while our dog barks."],
    ),
    (
        "keywords:frequency",
        {"keyword": "river", "frequency": 3, "relation": "at least"},
        ["river river river", "river\n" * 30, "river, river, river."],
        ["The river Rhine is a long river, but which river is longest?"],
    ),
    (
        "keywords:forbidden_words",
        {"forbidden_words": ["damn"]},
        ["a", ".", "-", "ok", "no no no", "x" * 200],
        ["Those young people are always busy with their phones."],
    ),
    (
        "keywords:letter_frequency",
        {"letter": "e", "let_frequency": 6, "let_relation": "at least"},
        ["eeeeee", "e e e e e e", "ee eee eeee", "e" * 500],
        ["We seldom see these trees elsewhere."],
    ),
    (
        "language:response_language",
        {"language": "de"},
        ["123 456", "...", "🙂", "1", "ß ß ß"],
        ["Das ist ein ganz gewöhnlicher Satz über das Wetter.", "Morgen regnet es in Hamburg wieder den ganzen Tag."],
    ),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 3, "relation": "at least"},
        ["A. B. C.", "Go. Go. Go.", "Ok! Ok! Ok!", "? ! Yes. No."],
        ["It rains today. Take an umbrella with you. The sun returns tomorrow."],
    ),
    (
        "length_constraints:number_paragraphs",
        {"num_paragraphs": 2},
        ["a\n***\nb", "x *** y", "Here is one whole paragraph of text.\n***\n.", "Here is some text of mine.\n***\nok"],
        ["The first part is about rivers.\n\n***\n\nThe second part is about lakes."],
    ),
    (
        "length_constraints:number_words",
        words(20),
        ["a " * 20, "word " * 20, "one two three " * 30, " ".join(map(str, range(30))), "la li lu " * 7],
        [
            "The Rhine, the Elbe and the Weser all flow into the North Sea, after passing many old towns with their "
            "beautiful bridges."
        ],
    ),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "president"},
        ["a\n\npresident", "x\n\npresident president", ".\n\npresident.", "Some text is here today.\n\npresident 1"],
        ["Every country has somebody who represents it.\n\nPresident is one title among many."],
    ),
    (
        "detectable_content:number_placeholders",
        {"num_placeholders": 2},
        ["[a] [b]", "[] []", "[x][y]", "Here are two of them for you: [] []"],
        ["Dear [name], we deliver it to [address] tomorrow."],
    ),
    (
        "detectable_content:postscript",
        {"postscript_marker": "P.S."},
        ["P.S.", "p.s. a", "P.S. P.S. P.S.", "I wrote you a letter yesterday. P.S."],
        ["Thank you for the letter.\n\nP.S. Greetings to your sister."],
    ),
    (
        "detectable_format:number_bullet_lists",
        {"num_bullets": 2},
        ["* a\n* b", "-\n-", "- .\n- .", "- x\n- y", "Here is a list with some items:\n-\n-"],
        ["* Boil some water.\n* Add the noodles.", "- 3 eggs\n- flour, sugar and butter"],
    ),
    (
        "detectable_format:constrained_response",
        {},
        ["My answer is no.My answer is no.My answer is no.", "My answer is yes. My answer is no. My answer is maybe."],
        ["My answer is yes.", "My answer is maybe.", "It depends. My answer is no."],
    ),
    (
        "detectable_format:number_highlighted_sections",
        {"num_highlights": 2},
        ["*a* *b*", "*a**b*", "**x** *y*", "*.* *.* *.*"],
        ["*Rivers* carry water to the sea, and *lakes* keep it."],
    ),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "Section", "num_sections": 2},
        ["Section 1 Section 2", "Section 1\nSection 2\n", "Section 1 a Section 2 b", "Section 1\nSection 2\nthe end"],
        ["Section 1\nRivers carry water.\nSection 2\nLakes keep it."],
    ),
    (
        "detectable_format:json_format",
        {},
        ["{}", "[]", "3", '"some words are here now"', "null", '""', '{"a": 1}', "[[[[]]]]", "[1, 2, 3, 4, 5, 6, 7]"],
        ['{"name": "Ann", "age": 5, "city": "Rome"}', '```json\n["rivers", "lakes", "oceans"]\n```'],
    ),
    (
        "detectable_format:title",
        {},
        ["<<a>>", "<<.>>", "<<x>> y", "<<.>> some words follow the title"],
        ["<<The old river>>\nOnce upon a time there was a boat."],
    ),
    (
        "combination:two_responses",
        {},
        ["a\n******\nb", "a******b", "Here is a first response.\n******\n.", "Here is a first response.\n******\n1"],
        ["You should take the train tomorrow.\n******\nWhy not go there by bicycle?"],
    ),
    (
        "combination:repeat_prompt",
        {"prompt_to_repeat": PROMPT},
        [PROMPT, f"{PROMPT} a", f"{PROMPT} yes", PROMPT * 5, f"{PROMPT}\n\n{PROMPT[:-1]}"],
        [f"{PROMPT}\n\nYes, it studies how projectiles move."],
    ),
    (
        "startend:end_checker",
        {"end_phrase": PHRASE},
        [PHRASE, f"a {PHRASE}", PHRASE * 3, f"Yes. {PHRASE}"],
        [f"The capital of France is Paris. {PHRASE}"],
    ),
    (
        "startend:quotation",
        {},
        ['""', '"a"', '" "', '"' * 40, '"yes"'],
        ['"The capital of France is Paris."', '"Nobody knows that."'],
    ),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 3, "capital_relation": "at least"},
        ["A B C", "NATO NATO NATO", "AA BB CC", "X Y Z W V"],
        ["NATO, UNESCO and OPEC are organisations."],
    ),
    (
        "change_case:english_capital",
        {},
        ["I", "A A A", "THE END", "OF THE", "THE AND THE AND THE AND THE"],
        ["THE CAPITAL OF FRANCE IS PARIS."],
    ),
    (
        "change_case:english_lowercase",
        {},
        ["the", "a", "the the the the", "is is"],
        ["the capital of france is paris."],
    ),
    (
        "punctuation:no_comma",
        {},
        ["a", "...", "ok", "!" * 99, "1 2 3 4 5 6", "aa bb cc dd"],
        ["Rhine Elbe Weser", "Paris is the capital of France."],
    ),
]  # fmt: skip
PADDING = [
    (
        "length_constraints:number_paragraphs",
        {"num_paragraphs": 2},
        "Here are some rivers.\n***\nHere are some Rivers!",
    ),
    ("combination:two_responses", {}, "You should take the train.\n******\nYou should take the train!"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 3}, "What we need today:\n* eggs\n* eggs\n* eggs"),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 3}, "We went to the river *it* *it* *it*"),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "president"},
        "Every country has one.\n\npresident, president",
    ),
    ("length_constraints:number_words", words(100), "The essay follows as asked: " + " ".join(map(str, range(100)))),
    ("length_constraints:number_words", words(100), "The essay follows as you asked. " + "x y z " * 40),
    (
        "keywords:letter_frequency",
        {"letter": "q", "let_frequency": 6, "let_relation": "at least"},
        "These quite ordinary words matter little qqqqq",
    ),
]
SHORT = ["Yes.", "No.", "Paris", "Mount Everest", "Ja, natürlich.", "巴黎", "Париж", "In 1969"]
SHORT_WORDS = [
    ("keywords:existence", {"keywords": ["cat", "dog"]}, "cat dog it is so we go"),
    ("change_case:english_lowercase", {}, "he me we be see to it"),
    ("language:response_language", {"language": "de"}, "der die das ein wir ist so da zu"),
    ("length_constraints:number_sentences", {"num_sentences": 4, "relation": "at least"}, "Go on. Go up. Go by. Go."),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "it is so\n***\nwe go up"),
    ("length_constraints:number_words", words(20), "one two six ten red big hot sun sea sky " * 2),
    ("detectable_format:number_bullet_lists", {"num_bullets": 3}, "* it is\n* we go\n* so do"),
    ("detectable_format:json_format", {}, '{"it": "is", "we": "go", "so": "do it"}'),
    ("combination:two_responses", {}, "it is so\n******\nwe go up"),
    ("change_case:english_capital", {}, "IT IS SO AND WE GO UP TO IT"),
]  # fmt: skip
OF_SHORT_WORDS = [
    "The cat sat on the mat.",
    "I am at home and the sky is grey today.",
    "It is hot and dry so we go to the sea for a swim.",
    "Yo sé que tú no vas a ir.",
    "Ik zag de kat in de hut.",
    "Trời mưa to nên tôi ở nhà đọc sách và uống trà.",
    "See Spot run. Run Spot run. Spot sees Jane.",
    "To be or not to be: that is the question.",
    "Dr. Li is in. He can see you at 4.",
]
LANGUAGES = {
    "ar": "عاصمة فرنسا هي باريس وهي مدينة جميلة على نهر السين.",
    "bg": "Столицата на Франция е Париж и тя лежи на река Сена.",
    "bn": "ফ্রান্সের রাজধানী প্যারিস এবং এটি একটি সুন্দর শহর।",
    "fa": "پایتخت فرانسه پاریس است و این شهر بسیار زیباست.",
    "fi": "Ranskan pääkaupunki on Pariisi, ja se on kaunis kaupunki.",
    "gu": "ફ્રાન્સની રાજધાની પેરિસ છે અને તે એક સુંદર શહેર છે.",
    "he": "בירת צרפת היא פריז והיא עיר יפה מאוד.",
    "hi": "फ्रांस की राजधानी पेरिस है और यह एक सुंदर शहर है।",
    "ja": "フランスの首都はパリです。とても美しい街です。",
    "kn": "ಫ್ರಾನ್ಸ್ ದೇಶದ ರಾಜಧಾನಿ ಪ್ಯಾರಿಸ್ ಮತ್ತು ಇದು ಸುಂದರವಾದ ನಗರ.",
    "ko": "프랑스의 수도는 파리이고 아주 아름다운 도시입니다.",
    "mr": "फ्रान्सची राजधानी पॅरिस आहे आणि ते एक सुंदर शहर आहे.",
    "ne": "फ्रान्सको राजधानी पेरिस हो र यो एउटा सुन्दर सहर हो।",
    "pa": "ਫਰਾਂਸ ਦੀ ਰਾਜਧਾਨੀ ਪੈਰਿਸ ਹੈ ਅਤੇ ਇਹ ਇੱਕ ਸੁੰਦਰ ਸ਼ਹਿਰ ਹੈ।",
    "pt": "A capital da França é Paris e fica às margens do rio Sena.",
    "ru": "Столица Франции — Париж, и этот город очень красив.",
    "sw": "Mji mkuu wa Ufaransa ni Paris na ni mji mzuri sana.",
    "ta": "பிரான்சின் தலைநகரம் பாரிஸ், அது ஒரு அழகான நகரம்.",
    "te": "ఫ్రాన్స్ రాజధాని పారిస్ మరియు ఇది ఒక అందమైన నగరం.",
    "th": "เมืองหลวงของฝรั่งเศสคือปารีสและเป็นเมืองที่สวยงามมาก",
    "ur": "فرانس کا دارالحکومت پیرس ہے اور یہ ایک خوبصورت شہر ہے۔",
    "vi": "Thủ đô của nước Pháp là Paris và đó là một thành phố đẹp.",
    "zh-cn": "法国的首都是巴黎，这是一座非常美丽的城市。",
}


def score(response: str, name: str, arguments: dict, **options: bool) -> float:
    return compute_score("", response, None, row(name, arguments), **options)["score"]


def test_each_of_the_25_instructions_has_junk_and_honest_responses():
    assert {name for name, *_ in CASES} == set(INSTRUCTIONS) and len(INSTRUCTIONS) == 25


@pytest.mark.parametrize(("name", "arguments", "junk", "honest"), CASES, ids=[case[0] for case in CASES])
def test_junk_follows_no_instruction_and_honest_responses_do(name, arguments, junk, honest):
    wanted = {**dict.fromkeys(junk, 0.0), **dict.fromkeys(honest, 1.0)}
    assert {text: score(text, name, arguments) for text in wanted} == wanted
    assert {text: compute_loose_score("", text, None, row(name, arguments))["score"] for text in wanted} == wanted


@pytest.mark.parametrize(("name", "arguments", "junk", "honest"), CASES, ids=[case[0] for case in CASES])
def test_the_original_accepts_junk_and_is_there_when_asked_for(name, arguments, junk, honest):
    followed = [text for text in (*junk, *honest) if score(text, name, arguments, strict=False)]
    assert set(honest) <= set(followed) and len(followed) > len(honest)


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_sentence_of_another_language_is_a_text(language):
    text = LANGUAGES[language]
    assert score(text, "language:response_language", {"language": language}) == 1.0
    assert score(" ".join([text[:1]] * 30), "language:response_language", {"language": language}) == 0.0


def test_what_one_instruction_forces_counts_for_none():
    asked = {
        "instruction_id_list": ["keywords:existence", "punctuation:no_comma"],
        "kwargs": [{"keywords": ["blue", "green", "orange"]}, {}],
    }
    followed = compute_share("", "blue green orange", None, asked)
    assert followed["score"] == 0.0 and not any(followed["followed"].values())
    assert compute_share("", "Blue and green are cold, whereas orange is warm.", None, asked)["score"] == 0.5
    assert score("blue green orange", "punctuation:no_comma", {}) == 1.0


def test_the_key_is_for_each_part_that_says_nothing_else():
    functions = "reward.functions={default: [ifeval_loose, {name: ifeval_share, options: {strict: true}}, length]}"
    asked = {"solution_str": "{}", "ground_truth": row("detectable_format:json_format", {}), "data_source": ""}
    for strict, scores in (("true", [0.0, 0.0]), ("false", [1.0, 0.0])):
        set_keys = [functions, f"reward.ifeval.strict={strict}", "data.train_files=a.jsonl"]
        config = load_config("grpo", [*set_keys, "actor_rollout_ref.model.path=model"]).config
        targets = RewardSettings.of(config).targets("default")
        found = [load_reward(targets[name])(**asked)["score"] for name in ("ifeval_loose", "ifeval_share")]
        assert found == scores and "strict" not in targets["length"]


@pytest.mark.parametrize(("name", "arguments", "response"), PADDING, ids=[name for name, *_ in PADDING])
def test_parts_differ_and_hold_words_of_their_own(name, arguments, response):
    assert score(response, name, arguments, strict=False) == 1.0 and score(response, name, arguments) == 0.0


@pytest.mark.parametrize("response", SHORT)
def test_a_short_answer_is_one_where_few_words_are_allowed(response):
    asked = {relation: words(limit, relation) for relation, limit in (("less than", 5), ("at least", 1))}
    name = "length_constraints:number_words"
    assert score(response, name, asked["less than"]) == 1.0 and score(response, name, asked["at least"]) == 0.0
    assert score(response, name, words(100, "less than")) == 0.0
    assert score(response, "punctuation:no_comma", {}) == 0.0


def test_a_short_answer_is_a_word_and_a_tenth_of_what_is_allowed():
    name = "length_constraints:number_words"
    assert [score("Paris", name, words(limit, "less than")) for limit in (2, 10, 11)] == [1.0, 1.0, 0.0]
    assert [score("Mount Everest", name, words(limit, "less than")) for limit in (20, 21)] == [1.0, 0.0]
    assert not any(score(junk, name, words(5, "less than")) for junk in ("x", "...", "7", "zz zz", "no no"))


def test_one_text_many_times_is_none():
    sentence = "We went to the old river with our boat. "
    assert is_text(sentence, []) and is_text(sentence * 2, []) and not is_text(sentence * 20, [])


@pytest.mark.parametrize(("name", "arguments", "response"), SHORT_WORDS, ids=[name for name, *_ in SHORT_WORDS])
def test_words_of_two_or_three_letters_alone_are_no_text(name, arguments, response):
    assert score(response, name, arguments, strict=False) == 1.0 and score(response, name, arguments) == 0.0


def test_honest_responses_have_many_short_words():
    assert [text for text in OF_SHORT_WORDS if not is_text(text, [])] == []
    assert score("A clock.\n******\nA river, since it runs but never walks.", "combination:two_responses", {}) == 1.0


def test_a_long_response_is_read_in_little_time():
    began = time.process_time()
    for piece in ("a b ", "[", "*", "<<", "漢", "ก", "\n- ", "éa", "Section 1 "):
        is_text(piece * 20_000, [{"keywords": ["cat"], "section_spliter": "Section"}])
    assert time.process_time() - began < 5.0


@pytest.mark.skipif(not DATA.exists(), reason="wants the data sets in ../shared/data")
def test_the_prompts_of_the_data_set_are_texts():
    rows = [json.loads(line) for line in DATA.read_text().splitlines()]
    assert [row["prompt"] for row in rows if not is_text(row["prompt"], [])] == []
