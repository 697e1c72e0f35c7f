NOT_ADVICE: dict[str, tuple[str, ...]] = {}
ELSEWHERE: dict[str, tuple[str, ...]] = {}
NOT_YET: dict[str, tuple[str, ...]] = {}
